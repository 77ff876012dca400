"""What every launch of a kernel says."""

# Products and sums are fused into one rounding. Said, because Triton's own default is about to
# change, and the bits with it.
OPTIONS = {"enable_fp_fusion": True}
