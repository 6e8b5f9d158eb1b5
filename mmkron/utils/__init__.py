"""What every other package may use; imports neither torch nor OpenMMLab."""
