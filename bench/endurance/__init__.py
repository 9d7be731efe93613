"""A mesh under random load for minutes while its daemons are killed: load, clients, kills, samples, faults."""
