"""What the experts of the served models had to do, asked of the engines: by layer, expert and tenant."""
