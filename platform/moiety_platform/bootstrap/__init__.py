"""Resources of a gateway process, each with its hot reload of settings. `gateway` combines them."""
