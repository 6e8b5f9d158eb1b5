from mmkron.models.necks.pooling import GlobalAveragePoolingDropout

__all__ = ['GlobalAveragePoolingDropout']
