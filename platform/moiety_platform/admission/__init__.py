"""Who may enter: bounds on what is in flight, and early refusals of what is hopeless."""
