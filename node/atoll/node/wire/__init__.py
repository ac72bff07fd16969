"""Streams, the gate and traffic accounting: what every network of a node shares. No hivemind, no sockets opened here.

- `transport.py`: the `Network` and `Stream` interfaces that all other packages of the node use.
- `gate.py`: the table of admitted members; `peer_slots.py`: bounds on what a peer may have in progress.
- `streams.py`: frames over one socket; `refusals.py`: errors that cross a stream.
- `traffic.py`: byte counters, rate limits, the monthly allowance, the downlink estimate.
"""
