"""What engines share: the interface (``types.py``), sampling settings and random numbers (``sampling.py``)."""
