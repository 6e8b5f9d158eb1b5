"""Checks of arguments and the report on the environment; importing them loads neither torch nor OpenMMLab."""
