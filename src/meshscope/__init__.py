"""Place, move, cost: three instruments for sharded JAX programs."""
