"""The wire formats, one file each: a request body in, a `Call` out as JSON or as server-sent events."""
