"""A mesh and clients of it, for the modules here that do not make their own."""

from support.mesh_fixtures import http as http
from support.mesh_fixtures import mesh as mesh
from support.mesh_fixtures import sdk as sdk
