"""A weight, float or quantised, becomes a product."""
