// containerd's own tests of snapshotters, against `lazuli daemon`. LAZULI names the program.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	snapshots1 "github.com/containerd/containerd/snapshots"
	proxy1 "github.com/containerd/containerd/snapshots/proxy"
	testsuite1 "github.com/containerd/containerd/snapshots/testsuite"
	snapshots2 "github.com/containerd/containerd/v2/core/snapshots"
	proxy2 "github.com/containerd/containerd/v2/core/snapshots/proxy"
	testsuite2 "github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// By this name the suites know what overlayfs cannot do on any snapshotter: rename a directory of a lower layer.
const name = "overlayfs"

// The suite of containerd 1.x, through its client.
func TestSnapshotter1(t *testing.T) {
	testsuite1.SnapshotterSuite(t, name, func(ctx context.Context, root string) (snapshots1.Snapshotter, func() error, error) {
		client, stop, err := start(root)
		if err != nil {
			return nil, nil, err
		}
		return proxy1.NewSnapshotter(client, "lazuli"), stop, nil
	})
}

// The suite of containerd 2.x, through its client.
func TestSnapshotter2(t *testing.T) {
	testsuite2.SnapshotterSuite(t, name, func(ctx context.Context, root string) (snapshots2.Snapshotter, func() error, error) {
		client, stop, err := start(root)
		if err != nil {
			return nil, nil, err
		}
		return proxy2.NewSnapshotter(client, "lazuli"), stop, nil
	})
}

// A daemon of its own for each test, with its state in root.
func start(root string) (api.SnapshotsClient, func() error, error) {
	lazuli := os.Getenv("LAZULI")
	if lazuli == "" {
		return nil, nil, errors.New("LAZULI does not name the program")
	}
	address := filepath.Join(root, "s.sock")
	config := filepath.Join(root, "config.toml")
	text := fmt.Sprintf("[snapshotter]\naddress = %q\n", address)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, nil, err
	}
	command := func(verb ...string) *exec.Cmd {
		options := []string{"--root", filepath.Join(root, "state"), "--config", config}
		command := exec.Command(lazuli, append(options, verb...)...)
		command.Stderr = os.Stderr
		return command
	}
	daemon := command("daemon")
	if err := os.Mkdir(filepath.Join(root, "state"), 0o700); err != nil {
		return nil, nil, err
	}
	if err := daemon.Start(); err != nil {
		return nil, nil, err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		connection, err := net.Dial("unix", address)
		if err == nil {
			connection.Close()
			break
		}
		if time.Now().After(deadline) {
			daemon.Process.Kill()
			return nil, nil, err
		}
	}
	connection, err := grpc.NewClient("unix://"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	return api.NewSnapshotsClient(connection), func() error {
		connection.Close()
		if err := command("stop", "--force").Run(); err != nil {
			return err
		}
		return daemon.Wait()
	}, nil
}
