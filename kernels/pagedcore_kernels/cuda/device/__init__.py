"""The kernels themselves: everything here is compiled for a GPU. Importing it needs numba-cuda."""
