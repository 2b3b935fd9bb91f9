"""Episodes: environments in worker processes that can be killed, and the player that brings them and a sampler
together."""
