"""Name the sample in the error of a transform: some loaders of the hosts raise without the file's name."""

from __future__ import annotations

from typing import Any

from mmengine.dataset import Compose
from torch.utils.data import DataLoader

_KEYS = ('img_path', 'seg_map_path', 'file_name')  # names of files in the hosts' samples


class DataError(RuntimeError):
    """A sample cannot be loaded; the message names it."""


class NamedPipeline(Compose):
    """The transforms of a dataset, with the sample in the message of their errors."""

    def __init__(self, pipeline: Compose) -> None:
        self.transforms = pipeline.transforms

    def __call__(self, data: dict) -> Any:
        """Apply the transforms to a sample."""
        files = [str(data[key]) for key in _KEYS if data.get(key) is not None]
        try:
            return super().__call__(data)
        except Exception as error:
            if any(file in str(error) for file in files):
                raise
            name = ' and '.join(files) or f'sample {data.get("sample_idx", "without a name")}'
            raise DataError(f'{name}: {type(error).__name__}: {error}') from error


def name_samples(dataset: Any) -> None:
    """Let the errors of a dataset, and of the datasets that it wraps, name the sample."""
    if type(getattr(dataset, 'pipeline', None)) is Compose:
        dataset.pipeline = NamedPipeline(dataset.pipeline)
    children = getattr(dataset, 'datasets', None)
    for child in children if isinstance(children, (list, tuple)) else [getattr(dataset, 'dataset', None)]:
        if child is not None:
            name_samples(child)


class NamedSamplesMixin:
    """A mixin for runners whose data loaders name the sample that cannot be loaded."""

    def build_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """Build a data loader."""
        loader = super().build_dataloader(*args, **kwargs)
        name_samples(loader.dataset)
        return loader
