"""One step on a GPU: its inputs packed on the host, captured graphs, sampling, tokens on their way back."""
