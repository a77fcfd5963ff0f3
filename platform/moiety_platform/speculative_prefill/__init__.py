"""What a conversation is likely to go on with, computed by an engine that has nothing else to do."""
