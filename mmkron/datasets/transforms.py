"""Image loading that does not let a damaged file pass."""

import io
from typing import Optional

import mmcv
import numpy as np
from mmcv.transforms import LoadImageFromFile as MMCVLoadImageFromFile
from mmengine import fileio
from PIL import Image

from mmkron.registry import TRANSFORMS

_END_MARKERS = (b'\xff\xd9', b'IEND\xaeB`\x82')  # JPEG, PNG


@TRANSFORMS.register_module()
class LoadImageFromFile(MMCVLoadImageFromFile):
    """Loads an image as MMCV does, and refuses files that are damaged or cut off.

    OpenCV 4 fills the missing part of a truncated JPEG with grey and says nothing. Here a file that does not end as a
    complete JPEG or PNG does is decoded once more, by Pillow, which does tell. Arguments and keys are those of
    :class:`mmcv.transforms.LoadImageFromFile`.

    Raises:
        OSError: The file cannot be read (as raised by the file backend, with the file's name).
        ValueError: The file is no complete image; the message names it and the reason. With ``ignore_empty=True``
            the sample is dropped (None) in both cases.
    """

    def transform(self, results: dict) -> Optional[dict]:
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
            body = data.rstrip(b'\0')  # some file systems and tools fill up with zeros
            if self.imdecode_backend != 'tifffile' and not body.endswith(_END_MARKERS):
                # Zeros are valid JPEG data, and in other formats they may be pixels.
                _check_complete(body if data.startswith(b'\xff\xd8') else data)
            img = mmcv.imfrombytes(data, flag=self.color_type, backend=self.imdecode_backend)
        except Exception as error:  # each decoder has its own types
            raise ValueError(f'image {str(filename)!r} cannot be decoded: {error}') from error
        if img is None:
            raise ValueError(
                f'image {str(filename)!r} cannot be decoded: no image data that {self.imdecode_backend} knows'
            )
        return img


def _check_complete(data: bytes) -> None:
    """Raise what Pillow raises if the pixels of an image are not all there."""
    # Pillow refuses twice as many: 2**30 pixels, which is the limit of MMCV's decoder, too.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, 2**29
    try:
        try:
            image = Image.open(io.BytesIO(data))
        except Exception:  # noqa: BLE001
            return  # a format, or a variant of one, that Pillow does not know; the decoder decides
        with image:
            image.load()
    finally:
        Image.MAX_IMAGE_PIXELS = limit
