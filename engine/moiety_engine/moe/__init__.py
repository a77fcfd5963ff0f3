"""What the engine knows of its experts: how much each is used."""
