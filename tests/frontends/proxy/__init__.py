"""Tests of the proxy: real HTTP on both sides."""
