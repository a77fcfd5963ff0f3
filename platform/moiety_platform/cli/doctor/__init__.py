"""`moiety doctor`: what is wrong with a deployment, and what mends it. Looks, and changes nothing."""
