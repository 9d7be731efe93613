"""The mesh that clients of other people talk to."""

from support.mesh_fixtures import mesh as mesh
