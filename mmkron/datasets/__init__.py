"""Data that the host libraries cannot read, and transforms that they lack."""

from mmkron.datasets.digits import Digits
from mmkron.datasets.event_datasets import CIFAR10DVS, DVS128Gesture
from mmkron.datasets.event_folder import EventFolder
from mmkron.datasets.event_transforms import EventAugment, EventFlip, PackEventInputs, PadFrames
from mmkron.datasets.transforms import LoadImageFromFile

__all__ = [
    'CIFAR10DVS',
    'DVS128Gesture',
    'Digits',
    'EventAugment',
    'EventFlip',
    'EventFolder',
    'LoadImageFromFile',
    'PackEventInputs',
    'PadFrames',
]
