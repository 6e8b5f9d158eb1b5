"""Efficient long-range operators as components of OpenMMLab: Kronecker attention, lambda layers, spiking attention."""

from mmkron.version import __version__

__all__ = ['__version__']
