"""Spiking neurons over several time steps, and batch norm fused with them."""
