"""fold: finding and contracting blocks in any JAX function."""
