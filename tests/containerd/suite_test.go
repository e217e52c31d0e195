// containerd's own tests of snapshotters, against `lazuli daemon`. LAZULI names the program.
package containerd

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/snapshots"
	"github.com/containerd/containerd/snapshots/proxy"
	"github.com/containerd/containerd/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func TestSnapshotter(t *testing.T) {
	lazuli := os.Getenv("LAZULI")
	if lazuli == "" {
		t.Fatal("LAZULI does not name the program")
	}
	// By this name the suite knows what overlayfs cannot do on any snapshotter: rename a directory of a lower layer.
	testsuite.SnapshotterSuite(t, "overlayfs", func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		return start(lazuli, root)
	})
}

// A daemon of its own for each test, with its state in root.
func start(lazuli, root string) (snapshots.Snapshotter, func() error, error) {
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
	snapshotter := proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "lazuli")
	return snapshotter, func() error {
		connection.Close()
		if err := command("stop", "--force").Run(); err != nil {
			return err
		}
		return daemon.Wait()
	}, nil
}
