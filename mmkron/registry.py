"""Child registries of MMEngine's roots under the scope ``mmkron``.

MMEngine imports this module when it meets the prefix, so ``type='mmkron.KANet'`` resolves in any host config
without ``custom_imports``.
"""

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import Registry

MODELS = Registry('model', parent=MMENGINE_MODELS, locations=['mmkron.models'])
DATASETS = Registry('dataset', parent=MMENGINE_DATASETS, locations=['mmkron.datasets'])
TRANSFORMS = Registry('transform', parent=MMENGINE_TRANSFORMS, locations=['mmkron.datasets'])
