"""Expert load statistics, expert replication and load balancing of mixture-of-experts (MoE) layers."""
