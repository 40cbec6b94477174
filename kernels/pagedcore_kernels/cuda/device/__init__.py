"""The kernels themselves: everything here is compiled for a card. Importing it needs numba-cuda."""
