"""What the GPU's kernels can serve, and what every launch of one says.

Needs neither torch nor Triton, so that a configuration can be checked without them.
"""

PAGE_SIZES = (16, 32, 64, 128)  # positions: a page is read in tiles of a power of two
HEAD_DIMS = (16, 32, 64, 128)

# Products and sums are fused into one rounding. Said, because Triton's own default is about to
# change, and the bits with it.
LAUNCH_OPTIONS = {"enable_fp_fusion": True}
