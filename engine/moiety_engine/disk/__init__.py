"""The prefix cache's tier on disk: what requests leave behind is written beside the steps, and restored while the next
request that begins so waits. Nothing here is in a step's way, and nothing that a disk does fails a request."""
