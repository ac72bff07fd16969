"""The swarm: libp2p and the DHT behind the gate. The only modules that import hivemind.

- `host.py` is the facade: it starts everything and implements `wire.transport.Network`.
- `p2pd.py`, `p2pd_control.py`, `p2p.py`, `p2pd_sockets.py`: the libp2p daemon, its client, its RPCs, its pacing.
- `hello.py`, `stream_acceptor.py`, `stripes.py`: admission, incoming streams, striped streams for bulk data.
- `dht.py`, `dht_messages.py`, `msgpack_scan.py`, `record_validator.py`, `addresses.py`: address records, their checks.
- `rtt_probe.py` measures round-trip times; `lazy_hivemind.py` makes hivemind's import cheap.
"""
