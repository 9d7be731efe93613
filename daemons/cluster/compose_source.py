"""The compose files of a cluster with what `up` was told beside them, to be read again for a roll."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from radixmesh.daemons.cluster.compose.compose import ComposeFile
from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.cluster.errors import UnknownServiceError
from radixmesh.daemons.cluster.plan import missing_host_paths, plan_cluster, plan_endpoints, scale_compose, unpublish


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeSource:
    """paths: absolute, later ones over earlier ones. shell: variables that the files may name. The rest: LocalCluster.

    The shell is that of the start: a roll from another terminal must not serve another model.
    """

    paths: Sequence[Path]
    shell: Mapping[str, str]
    scale: Mapping[str, int]
    environment: Mapping[str, Mapping[str, str]]
    project: str | None
    publish: bool

    def read(self) -> ComposeFile:
        """The files as they are now. Raises ClusterError for whatever is wrong with them."""
        compose = scale_compose(read_compose(self.paths, self.shell), self.scale)
        compose = _with_environment(compose, self.environment)
        compose = compose if self.publish else unpublish(compose)
        if self.project is not None:
            compose = replace(compose, project=self.project)
        for problem in missing_host_paths(compose):
            raise problem
        # Mistakes in the file are reported now, before anything runs; only free ports are missing for the real plan.
        plan_cluster(compose, dict.fromkeys(plan_endpoints(compose), 1), Path("/"))
        return compose


def _with_environment(compose: ComposeFile, environment: Mapping[str, Mapping[str, str]]) -> ComposeFile:
    unknown = sorted(environment.keys() - compose.services.keys())
    if unknown:
        raise UnknownServiceError(f"environment for {', '.join(unknown)}: the file has {', '.join(compose.services)}")
    services = {
        name: replace(service, environment={**service.environment, **environment.get(name, {})})
        for name, service in compose.services.items()
    }
    return replace(compose, services=services)
