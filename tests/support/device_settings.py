"""Settings of a device's worker for the tiny models, from which tests say what differs."""

from radixmesh.daemons.worker.cuda.load import DeviceSettings

# Plain attention, every kernel launched by itself: what the host can do too.
TINY_SETTINGS = DeviceSettings(
    dtype="float32",
    attention_backend="torch",
    load_format="auto",
    page_size=1,
    num_pages=64,
    num_slots=8,
    max_tokens_per_step=64,
    max_total_len=128,
    mem_fraction=0.5,
    cuda_graphs=False,
    use_pdl=False,
    deterministic=False,
)
