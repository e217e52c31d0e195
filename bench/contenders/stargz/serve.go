package main

import (
	"context"
	"net"
	"os"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/log"
	"github.com/containerd/stargz-snapshotter/fs/config"
	"github.com/containerd/stargz-snapshotter/service"
	"google.golang.org/grpc"
)

// serve answers containerd at a Unix socket until the context ends, then unmounts what it has mounted. Registries on loopback
// are asked without TLS, as upstream does it.
func serve(ctx context.Context, address, root string) error {
	if err := log.SetLevel("info"); err != nil {
		return err
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return err
	}
	snapshotter, err := service.NewStargzSnapshotterService(ctx, root, &service.Config{Config: defaults()})
	if err != nil {
		return err
	}
	defer snapshotter.Close()
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	listener, err := net.Listen("unix", address)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, server.Stop)
	return server.Serve(listener)
}

// defaults is what containerd-stargz-grpc has with an empty configuration file: these of its settings have a default other than
// zero where the file is read. All others have theirs where they are used. Layers are prefetched up to their landmark before a
// container starts, and fetched whole in the background.
func defaults() config.Config {
	return config.Config{
		DirectoryCacheConfig: config.DirectoryCacheConfig{Direct: true},
		FuseConfig:           config.FuseConfig{MergeBufferSize: 400 << 20, MergeWorkerCount: 10},
	}
}
