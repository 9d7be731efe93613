"""The dashboard outside Grafana: its queries against a live Prometheus, and its panels as a picture."""
