"""What-if simulations: replay of the last hour's traffic under other settings, in a simulator process."""
