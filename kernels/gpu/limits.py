"""What the GPU's kernels can serve. Needs neither torch nor Triton, so that the door can ask."""

PAGE_SIZES = (16, 32, 64, 128)  # positions: a page is read in tiles of a power of two
HEAD_DIMS = (16, 32, 64, 128)
