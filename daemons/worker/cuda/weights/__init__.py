"""The weights of a decoder on a device: read, cast, folded."""
