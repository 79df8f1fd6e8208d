"""The demo: the whole way from clips on disk to judged videos, on made-up shapes, with the product's own steps."""
