"""What can keep the WAN lab from working."""

from __future__ import annotations

from typing import ClassVar

from atoll.core.errors import AtollError, ConfigError, ExitCode


class TopologyError(ConfigError):
    """A topology file does not say what it must; the message names the field."""


class LabUnavailable(AtollError):
    """This machine or this user cannot make network namespaces and TUN devices."""

    exit_code: ClassVar[ExitCode] = ExitCode.CONFIG


class LabBroken(AtollError):
    """The lab's own processes or devices failed while it ran."""
