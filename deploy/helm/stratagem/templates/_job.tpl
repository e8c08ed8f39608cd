{{/* What every template needs. */}}

{{- define "stratagem.check" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "expected a release name of at most 40 lower-case letters, digits and '-' that starts with a letter, got %q: it becomes part of host names" .Release.Name) -}}
{{- end -}}
{{- $strategy := include "stratagem.strategy" . -}}
{{- if and (eq $strategy "ps") (lt (int .Values.ps.count) 1) -}}
{{- fail "the strategy ps needs ps.count of at least 1" -}}
{{- end -}}
{{- if and (ne $strategy "ps") (gt (int .Values.ps.count) 0) -}}
{{- fail (printf "the strategy %s trains without parameter servers: take ps, or ps.count 0" $strategy) -}}
{{- end -}}
{{- if and (not (include "stratagem.cluster" .)) (or .Values.evaluator (gt (int .Values.worker.count) 1)) -}}
{{- fail (printf "the strategy %s trains in one process: take worker.count 1 and no evaluator, or the strategies ring or ps" $strategy) -}}
{{- end -}}
{{- if and .Values.web (not (include "stratagem.cluster" .)) -}}
{{- fail "the chief serves the page, and this job is one process: use worker.count 2, or ps.count 1" -}}
{{- end -}}
{{- if and (not (include "stratagem.cluster" .)) (or .Values.tlsSecret .Values.tokenSecret (ne (int .Values.port) 2222)) -}}
{{- fail (printf "the strategy %s trains in one process, which has no use for tlsSecret, tokenSecret and port: leave them out" $strategy) -}}
{{- end -}}
{{- if and (ne $strategy "ps") (not (has (.Values.staleness | toString) (list "0" "inf"))) -}}
{{- fail (printf "a staleness of %v needs parameter servers: add ps; without them, workers train in step" .Values.staleness) -}}
{{- end -}}
{{- $told := dict "STRATAGEM_STRATEGY" "strategy" "STRATAGEM_STALENESS" "staleness" "STRATAGEM_WEB" "web" "STRATAGEM_BIND" "port" "STRATAGEM_TLS" "tlsSecret" -}}
{{- $told = merge $told (dict "STRATAGEM_NUM_WORKERS" "worker.count" "STRATAGEM_NUM_PS" "ps.count" "STRATAGEM_TOKEN_FILE" "tokenSecret") -}}
{{- $told = merge $told (dict "STRATAGEM_CHECKPOINT_EVERY_S" "checkpointEveryS") -}}
{{- range $name := keys .Values.environment | sortAlpha -}}
{{- if hasKey $told $name -}}
{{- fail (printf "environment.%s: the tasks are told theirs by other means; say it by %s" $name (get $told $name)) -}}
{{- else if has $name (list "TF_CONFIG" "RANK" "WORLD_SIZE" "LOCAL_RANK" "LOCAL_WORLD_SIZE" "MASTER_ADDR" "MASTER_PORT" "SLURM_STEP_NUM_TASKS" "STRATAGEM_TASK" "STRATAGEM_CHIEF" "STRATAGEM_ADVERTISE" "STRATAGEM_RUN_ID") -}}
{{- fail (printf "environment.%s: the tasks are told theirs by other means; leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq (int .Values.web) (int .Values.port) -}}
{{- fail (printf "expected a port for the page other than %d" (int .Values.port)) -}}
{{- end -}}
{{- $kept := include "stratagem.kept" . -}}
{{- $volume := lookup "v1" "PersistentVolumeClaim" .Release.Namespace .Release.Name -}}
{{- if dig "metadata" "deletionTimestamp" "" $volume -}}
{{- fail (printf "the volume of the last job %s is still being deleted, and its pods would wait for it for ever. Say this again after: kubectl --namespace %s wait --for=delete --timeout=-1s pvc/%s" .Release.Name .Release.Namespace .Release.Name) -}}
{{- end -}}
{{- $mode := dig "spec" "accessModes" (list .Values.volume.accessMode) $volume | first -}}
{{- $class := dig "spec" "storageClassName" "" $volume -}}
{{- if or (ne .Values.volume.accessMode $mode) (and $class .Values.volume.storageClassName (ne .Values.volume.storageClassName $class)) -}}
{{- fail (printf "the volume of the job %s is there with accessMode %s and storageClassName %q, which Kubernetes never changes: take these again, or begin anew (helm --namespace %s uninstall --wait %s deletes the volume, with its checkpoints)" .Release.Name $mode $class .Release.Namespace .Release.Name) -}}
{{- end -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" $volume -}}
{{- $gib := get (dict "Gi" 1 "Ti" 1024 "Pi" 1048576) (regexFind "[A-Z]i$" $size) | default 0 | mul (regexFind "^[0-9]+" $size | int64) -}}
{{- if lt (int64 .Values.volume.sizeGib) $gib -}}
{{- fail (printf "the volume of the job %s has %d GiB, and Kubernetes never makes one smaller: take volume.sizeGib=%d again" .Release.Name $gib $gib) -}}
{{- end -}}
{{- $before := dig "metadata" "annotations" "stratagem/kept" $kept $volume -}}
{{- if and $kept (ne $kept $before) -}}
{{- fail (printf "the job %s keeps its %s, and would end with 2 at %s: take that again, or a release of another name (helm uninstall deletes the volume, with its checkpoints)" .Release.Name $before $kept) -}}
{{- end -}}
{{- end }}

{{/* The strategy, with auto resolved. */}}
{{- define "stratagem.strategy" -}}
{{- if ne .Values.strategy "auto" -}}{{ .Values.strategy }}
{{- else if gt (int .Values.ps.count) 0 -}}ps
{{- else if gt (int .Values.worker.count) 1 -}}ring
{{- else if gt (int .Values.worker.acceleratorCount) 1 -}}mirrored
{{- else -}}one
{{- end -}}
{{- end }}

{{/* Not empty when the job is a cluster, empty when it is one process. */}}
{{- define "stratagem.cluster" -}}
{{- if has (include "stratagem.strategy" .) (list "ring" "ps") }}yes{{ end -}}
{{- end }}

{{/* What a job on parameter servers keeps as long as its volume is there. */}}
{{- define "stratagem.kept" -}}
{{- if eq (include "stratagem.strategy" .) "ps" -}}
staleness {{ .Values.staleness }}{{ if eq (.Values.staleness | toString) "0" }} and worker.count {{ .Values.worker.count }}{{ end }}
{{- end -}}
{{- end }}

{{/* What it keeps while it runs, where all are in step: how many they are. */}}
{{- define "stratagem.fixed" -}}
{{- $strategy := include "stratagem.strategy" . -}}
{{- if eq $strategy "ring" -}}ring of {{ ternary "any" .Values.worker.count (hasKey .Values.environment "STRATAGEM_MAX_WORKERS") }}
{{- else if and (eq $strategy "ps") (eq (.Values.staleness | toString) "0") -}}{{ .Values.ps.count }} ps, {{ .Values.worker.count }} workers
{{- end -}}
{{- end }}

{{/* TF_CONFIG without a task: the same for every pod. */}}
{{- define "stratagem.tfConfig" -}}
{{- $cluster := dict -}}
{{- $counts := dict "chief" 1 "worker" (int .Values.worker.count) "ps" (int .Values.ps.count) "evaluator" (ternary 1 0 .Values.evaluator) -}}
{{- range $role, $count := $counts -}}
{{- $addresses := list -}}
{{- range $index := until $count -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:%d" $role $index $.Release.Name (int $.Values.port)) -}}
{{- end -}}
{{- if $addresses }}{{ $_ := set $cluster $role $addresses }}{{ end -}}
{{- end -}}
{{- dict "cluster" $cluster | toJson -}}
{{- end }}

{{/* Labels by which the job finds its pods. Takes root and role. */}}
{{- define "stratagem.selector" -}}
app.kubernetes.io/name: stratagem
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Those, and the user's own. */}}
{{- define "stratagem.labels" -}}
{{- $own := include "stratagem.selector" . | fromYaml -}}
{{- merge $own .root.Values.labels | toYaml -}}
{{- end }}

{{- define "stratagem.ask" -}}
exec:
  command: [timeout, "15", stratagem, health{{ range . }}, {{ . }}{{ end }}]
{{- end }}

{{/* The Job of one task. Takes root, role, index and machine. Its pod cannot be changed, which Helm would notice halfway, nor what is fixed. */}}
{{- define "stratagem.job" -}}
{{- $values := .root.Values -}}
{{- $job := printf "%s-%s-%d" .root.Release.Name .role .index -}}
{{- $pod := include "stratagem.pod" . -}}
{{- $made := sha256sum (print $pod (include "stratagem.fixed" .root)) -}}
{{- $there := lookup "batch/v1" "Job" .root.Release.Namespace $job -}}
{{- if and (not $there) (lookup "batch/v1" "Job" .root.Release.Namespace (printf "%s-chief-0" .root.Release.Name) | dig "status" "succeeded" 0) -}}
{{- fail (printf "the job %s is over: %s would find no chief. Delete the Jobs (kubectl --namespace %s delete job -l app.kubernetes.io/instance=%s) and say this again: the new ones go on from what it has saved" .root.Release.Name $job .root.Release.Namespace .root.Release.Name) -}}
{{- end -}}
{{- if ne $made (dig "metadata" "annotations" "stratagem/pod" $made $there) -}}
{{- fail (printf "the Job %s is there with another image, script, argument, machine, strategy, label, port or Secret, or the job with another number of tasks (a ring, staleness 0), which nobody can change while it runs. Delete the Jobs (kubectl --namespace %s delete job -l app.kubernetes.io/instance=%s) and say this again: the tasks save and end, and the new ones go on from there" $job .root.Release.Namespace .root.Release.Name) -}}
{{- end -}}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ $job }}
  annotations:
    stratagem/pod: {{ $made }}
  labels: {{- include "stratagem.labels" (dict "root" .root "role" .role) | nindent 4 }}
spec:
  backoffLimit: 20
  {{- if $values.kubernetes126 }}
  ttlSecondsAfterFinished: 86400
  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      - action: Ignore
        onExitCodes:
          operator: In
          values: [143]
        onPodConditions: [] # up to 1.28 the schema asks for it in every rule
      - action: FailJob
        onExitCodes:
          operator: In
          values: [2, 42]
        onPodConditions: []
  {{- end }}
  template:
    {{- $pod }}
{{- end }}

{{/* Its pod, likewise. */}}
{{- define "stratagem.pod" -}}
{{- $values := .root.Values -}}
{{- $name := .root.Release.Name -}}
{{- $stem := printf "%s-%d" .role .index -}}
{{- $memory := printf "%dMi" (round (mulf .machine.memoryGib 1024) 0 | int) -}}
{{- $cores := max 1 (floor .machine.cpuCores | int) -}}
{{- $gpus := int .machine.acceleratorCount -}}
{{- $tolerations := ternary (list (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule")) list (gt $gpus 0) -}}
{{- $nodes := ternary (dict "accelerator" .machine.acceleratorType) dict (not (empty .machine.acceleratorType)) -}}
{{- $pod := ternary $values.workerPod dict (eq .role "worker") }}
    metadata:
      labels: {{- include "stratagem.labels" (dict "root" .root "role" .role) | nindent 8 }}
    spec:
      hostname: {{ $stem }}
      subdomain: {{ $name | quote }}
      serviceAccountName: {{ $name | quote }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      restartPolicy: {{ ternary "Never" "OnFailure" $values.kubernetes126 }}
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        seccompProfile:
          type: RuntimeDefault
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "stratagem.selector" (dict "root" .root "role" .role) | nindent 14 }}
      {{- with concat $tolerations ($pod.tolerations | default list) }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with merge $nodes ($pod.nodeSelector | default dict) }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $pod.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: task
          image: {{ $values.image | quote }}
          imagePullPolicy: IfNotPresent
          command:
            - stratagem
            - {{ .role }}
            {{- if has .role (list "worker" "evaluator") }}
            {{- range prepend $values.args $values.script }}
            - {{ . | replace "$" "$$" | quote }}
            {{- end }}
            {{- end }}
          envFrom:
            - configMapRef:
                name: {{ $name | quote }}
          env:
            - name: STRATAGEM_TASK
              value: "{{ .role }}:{{ .index }}"
            - name: STRATAGEM_RUN_ID
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['controller-uid']
            {{- range list "OMP_NUM_THREADS" "STRATAGEM_NUM_THREADS" }}
            {{- if not (hasKey $values.environment .) }}
            - name: {{ . }}
              value: {{ $cores | quote }}
            {{- end }}
            {{- end }}
          {{- if and (include "stratagem.cluster" .root) (ne .role "evaluator") }}
          ports:
            - name: grpc
              containerPort: {{ $values.port }}
            {{- if and (eq .role "chief") $values.web $values.tlsSecret }}
            - name: web
              containerPort: {{ $values.web }}
            {{- end }}
          startupProbe:
            {{- include "stratagem.ask" list | nindent 12 }}
            periodSeconds: 5
            timeoutSeconds: 15
            failureThreshold: 180
          livenessProbe:
            {{- include "stratagem.ask" list | nindent 12 }}
            periodSeconds: 30
            timeoutSeconds: 15
            failureThreshold: 6
          readinessProbe:
            {{- include "stratagem.ask" (list "--ready") | nindent 12 }}
            periodSeconds: 30
            timeoutSeconds: 15
          {{- end }}
          resources:
            requests:
              cpu: {{ round (mulf .machine.cpuCores 1000) 0 | int }}m
              memory: {{ $memory }}
            limits:
              memory: {{ $memory }}
              {{- if $gpus }}
              nvidia.com/gpu: {{ $gpus | quote }}
              {{- end }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
          volumeMounts:
            - name: job
              mountPath: /var/lib/stratagem
            - name: tmp
              mountPath: /tmp
            - name: shm
              mountPath: /dev/shm
            {{- if $values.tlsSecret }}
            - name: tls
              mountPath: /etc/stratagem/tls
              readOnly: true
            {{- end }}
            {{- if $values.tokenSecret }}
            - name: token
              mountPath: /etc/stratagem/token
              readOnly: true
            {{- end }}
      volumes:
        - name: job
          persistentVolumeClaim:
            claimName: {{ $name | quote }}
        - name: tmp
          emptyDir: {}
        - name: shm
          emptyDir:
            medium: Memory
        {{- with $values.tlsSecret }}
        - name: tls
          secret:
            secretName: {{ . | quote }}
            defaultMode: 288 # octal 440
            items: # no other task's key
              {{- range list "ca.crt" (printf "%s.crt" $stem) (printf "%s.key" $stem) }}
              - key: {{ . }}
                path: {{ . }}
              {{- end }}
        {{- end }}
        {{- with $values.tokenSecret }}
        - name: token
          secret:
            secretName: {{ . | quote }}
            defaultMode: 288
        {{- end }}
{{- end }}
