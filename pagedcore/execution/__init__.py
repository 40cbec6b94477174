"""One planned step becomes sampled tokens and moved bytes."""
