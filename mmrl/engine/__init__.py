"""Inside one rank: the sampler, the learner, and the weights that move between them."""
