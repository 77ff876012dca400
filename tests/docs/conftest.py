"""Ray Serve warns of its own use of pydantic when it is imported, which is no fault of ours."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
