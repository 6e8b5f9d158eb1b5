"""Data that the host libraries cannot read, and transforms that they lack."""

from mmkron.datasets.digits import Digits
from mmkron.datasets.transforms import LoadImageFromFile

__all__ = ['Digits', 'LoadImageFromFile']
