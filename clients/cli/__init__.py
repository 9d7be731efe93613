"""The command line: `radixmesh <verb>`. Each verb is a module that is imported only when it is asked for."""
