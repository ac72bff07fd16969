"""Direct connections: TCP and TLS between two members, without libp2p, for bulk data; paced below the uplink's rate.

- `direct_path.py` is the facade: offers, listener and dialler of one host.
- `dialler.py`, `listener.py`, `tickets.py`, `hosts.py`: how two members connect and authenticate.
- `tls.py`, `tls_streams.py`, `reader.py`, `tcp.py`: the connection; `stream.py`: its streams, one after another.
- `pacer.py`, `rates.py`: measuring and sharing the uplink; also for libp2p's connections (`swarm/p2pd_sockets.py`).
- `protocol.py`: constants on which both ends agree.
"""
