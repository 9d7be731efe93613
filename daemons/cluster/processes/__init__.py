"""The local processes of a cluster: started, probed, restarted, stopped."""
