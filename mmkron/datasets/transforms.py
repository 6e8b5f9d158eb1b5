"""Image loading that raises an error for damaged files."""

from __future__ import annotations

import io

import mmcv
import numpy as np
from mmcv.transforms import LoadImageFromFile as MMCVLoadImageFromFile
from mmengine import fileio
from PIL import Image

from mmkron.registry import TRANSFORMS

_END_MARKERS = (b'\xff\xd9', b'IEND\xaeB`\x82')  # JPEG, PNG


@TRANSFORMS.register_module()
class LoadImageFromFile(MMCVLoadImageFromFile):
    """Load an image as MMCV does, and raise ValueError for damaged or truncated files.

    OpenCV 4 silently fills the missing part of a truncated JPEG with gray. Here, a file without the end marker of JPEG
    or PNG is also decoded by Pillow, which reports truncation. Arguments and keys are the same as in
    :class:`mmcv.transforms.LoadImageFromFile`. With ``ignore_empty=True`` a sample that cannot be loaded is dropped.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not a complete image. The message names the file and the reason.
    """

    def transform(self, results: dict) -> dict | None:
        if 'img' in results and 'img_path' not in results:
            return results  # MMPretrain's inferencers load the image and remove only the transform of MMCV's name
        filename = results['img_path']
        try:
            img = self._load(filename)
        except Exception:
            if self.ignore_empty:
                return None
            raise
        if self.to_float32:
            img = img.astype(np.float32)
        results['img'] = img
        results['img_shape'] = results['ori_shape'] = img.shape[:2]
        return results

    def _load(self, filename: str) -> np.ndarray:
        if self.file_client_args is not None:
            data = fileio.FileClient.infer_client(self.file_client_args, filename).get(filename)
        else:
            data = fileio.get(filename, backend_args=self.backend_args)
        try:
            if not data:
                raise ValueError('the file is empty')
            body = data.rstrip(b'\0')  # some file systems and tools pad with zeros
            if self.imdecode_backend != 'tifffile' and not body.endswith(_END_MARKERS):
                # Zeros are valid JPEG data, and in other formats they may be pixels.
                _check_complete(body if data.startswith(b'\xff\xd8') else data)
            img = mmcv.imfrombytes(data, flag=self.color_type, backend=self.imdecode_backend)
        except Exception as error:  # decoders raise errors of many types
            raise ValueError(f'image {str(filename)!r} cannot be decoded: {error}') from error
        if img is None:
            raise ValueError(
                f'image {str(filename)!r} cannot be decoded: no image data that {self.imdecode_backend} knows'
            )
        return img


def _check_complete(data: bytes) -> None:
    """Raise Pillow's error if pixels of an image are missing."""
    # Pillow raises above twice this number: 2**30 pixels, which is also the limit of MMCV's decoder.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, 2**29
    try:
        try:
            image = Image.open(io.BytesIO(data))
        except Exception:  # noqa: BLE001
            return  # Pillow does not know the format; the decoder decides
        with image:
            image.load()
    finally:
        Image.MAX_IMAGE_PIXELS = limit
