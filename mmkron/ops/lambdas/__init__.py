"""Content and position lambdas."""

from mmkron.ops.lambdas.content import content_lambda, content_matrix
from mmkron.ops.lambdas.position import position_lambda

__all__ = ['content_lambda', 'content_matrix', 'position_lambda']
