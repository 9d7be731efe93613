"""Schedulers, detokenizers and tokenizers: links that are kept up, pools of replicas, frames."""
