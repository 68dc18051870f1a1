"""How fast a training step is, and what packing, balancing and asynchronous capture each give."""
